#!/bin/bash
# The shell line that Clean Slate replaces, timed on a leaked server. Only for a PID namespace with its own /proc and
# /dev/shm, whose first process this script is: the pattern of pkill then reaches nothing else. Its own command line
# must not match that pattern, so the interpreter comes as BENCH_PYTHON, the server as BENCH_SERVER.
set -u
[ $$ -eq 1 ] || { echo "shell_line.sh: not the first process of a PID namespace; pkill would reach others" >&2; exit 2; }

coproc SERVER { exec "$BENCH_PYTHON" $BENCH_SERVER; }
front_end=$SERVER_PID
read -r -u "${SERVER[0]}" _ || { echo "shell_line.sh: the server has not started" >&2; exit 1; }
kill -9 "$front_end"
wait "$front_end" 2>/dev/null

log=$(mktemp)
begun=$EPOCHREALTIME
{
    find "$BENCH_SOURCES" -path '*deepseek_v2*' -name '*.pyc' -delete
    pkill -9 -f 'python3|vllm'
    sleep 3
    kill -9 $(fuser /dev/nvidia* 2>/dev/null)
    sleep 2
    rm -f /dev/shm/psm_* /dev/shm/sem.mp-* /dev/shm/*vllm* /dev/shm/*nccl*
    rm -f "$log"
    nvidia-smi | head -2
} >/dev/null 2>&1
ended=$EPOCHREALTIME
awk -v begun="$begun" -v ended="$ended" 'BEGIN { printf "%.6f\n", ended - begun }'
