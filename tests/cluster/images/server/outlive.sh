#!/bin/sh
# PID 1 of a container that outlives its server, as a shell or a supervisor does: runs the command, and stays when that ends.
# SIGTERM goes to the command, and the container ends after it.
"$@" &
server=$!
trap 'kill -TERM "$server"; wait "$server"; exit 0' TERM INT
wait "$server"
echo "{\"ended\": $server, \"status\": $?}"
trap 'exit 0' TERM INT
while :; do
    sleep 3600 &
    wait $! # a signal ends this, and not the sleep
done
