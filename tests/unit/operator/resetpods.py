"""Reset pods as the API shows them, and what their nodes write: ordinary but for what a test says."""

import json
from typing import Any

from cleanslate_operator.noderesult import Gpu, GpuResult, NodeResult, NodeVerdict, Outcome, Process, Verdict
from cleanslate_operator.reset import Reset, ResetSpec
from cleanslate_operator.settings import Settings

NODE = "gpu-17"
UID = "5e1c7f3a-1b2c-4d5e-8f90-a1b2c3d4e5f6"
DAEMON_SET = "0d9c8b7a-6f5e-4d3c-9b2a-1f0e9d8c7b6a"
GPU_0 = "GPU-6f1c0a7e-0000-4000-8000-000000000000"
FINISHED = "2026-12-01T12:00:09Z"
GIB = 1 << 30

Object = dict[str, Any]


def reset(name: str = "pool-a", **spec: Any) -> Reset:
    """A GPUNodeReset."""
    return Reset(name=name, uid=UID, generation=1, spec=ResetSpec(**spec))


def settings(**known: Any) -> Settings:
    """The operator's settings."""
    return Settings(**{"image": "registry.example/cleanslate:1", **known})


def summary(**known: Any) -> Object:
    """The summary of a clean reset of one GPU."""
    nothing = {"removedCount": 0, "keptCount": 0, "bytesFreed": 0}
    return {
        "schema": "cleanslate.dev/report/v1",
        "verb": "reset",
        "scope": "orphans",
        "dryRun": False,
        "host": NODE,
        "startedAt": "2026-12-01T12:00:00.000Z",
        "durationSeconds": 0.531,
        "result": "Clean",
        "exitCode": 0,
        "message": "1 of 1 GPUs are clean",
        "gpuBytesFreed": 0,
        "sharedMemory": nothing,
        "caches": nothing,
        "logs": nothing,
        "gpus": [gpu()],
        "processes": [],
        "warnings": [],
        "omitted": {},
        **known,
    }


def gpu(result: str = "Clean", **known: Any) -> Object:
    """A GPU's row in a summary."""
    return {"index": 0, "uuid": GPU_0, "result": result, "usedBytes": 0, "message": f"GPU 0: {result}", **known}


def process(**known: Any) -> Object:
    """The row of an ended process in a summary."""
    row = {"pid": 4711, "title": "VLLM::EngineCore", "owner": f"pod {UID}", "verdict": "End", "outcome": "Ended"}
    return {**row, "reason": "its container is gone", **known}


def ended(message: Any = "", code: Any = 0, **known: Any) -> Object:
    """The status of a reset container that has ended; `message` may be a summary."""
    text = json.dumps(message) if isinstance(message, dict) else message
    end = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "message": text, "finishedAt": FINISHED}
    return {"name": "reset", "state": {"terminated": {**end, **known}}, "lastState": {}, "restartCount": 0}


def pod(container: Object | None = None, *, status: Object | None = None, **metadata: Any) -> Object:
    """A reset pod, bound to NODE; `container` is the status of its reset container."""
    owner = {"kind": "DaemonSet", "name": "pool-a", "uid": DAEMON_SET, "controller": True}
    limits = {"limits": {"memory": "512Mi"}}
    return {
        "metadata": {"namespace": "resets", "name": "pool-a-x7", "ownerReferences": [owner], **metadata},
        "spec": {"nodeName": NODE, "initContainers": [{"name": "reset", "resources": limits}]},
        "status": {"phase": "Pending", "initContainerStatuses": [container] if container else [], **(status or {})},
    }


def without_node(made: Object, pinned: str = NODE) -> Object:
    """The pod before it is bound: its affinity alone says what node it is for, as the DaemonSet controller writes it."""
    del made["spec"]["nodeName"]
    field = {"key": "metadata.name", "operator": "In", "values": [pinned]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    made["spec"]["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return made


def result(verdict: NodeVerdict = NodeVerdict.NOT_CLEAN, node: str = NODE, **known: Any) -> NodeResult:
    """What became of a node."""
    ordinary: Object = {"node": node, "result": verdict, "reason": str(verdict), "message": f"{node} is {verdict}"}
    return NodeResult(**{**ordinary, "finished_at": FINISHED, "duration_s": 0.5, **known})


def gpu_of(index: int, found: GpuResult = GpuResult.CLEAN, message: str = "a message") -> Gpu:
    """A GPU."""
    return Gpu(index=index, uuid=GPU_0, result=found, used_bytes=GIB, message=message)


def process_of(
    pid: int, verdict: Verdict = Verdict.KEEP, outcome: Outcome = Outcome.KEPT, text: str = "why"
) -> Process:
    """A process."""
    return Process(pid=pid, title=text, owner=text, verdict=verdict, outcome=outcome, reason=text)
