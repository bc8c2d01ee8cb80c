"""A simulated driver that one process has installed and another one changes, as the tests of the cluster do."""

from pathlib import Path

import pytest

from gpusim.gpusim import GIB, MIB, Driver, Gpu, Mig


def test_another_process_finds_the_driver_as_it_was_left(tmp_path: Path) -> None:
    """Faults, MIG instances and missing GPUs are read back, so that a change of one field changes nothing else."""
    mig = (Mig(uuid="MIG-1", residual_bytes=GIB, flicker=(1, 2)), Mig(uuid="MIG-2"))
    machine = (
        Gpu(uuid="GPU-a", minor=0, mig=mig, ghosts=(7,)),
        Gpu(uuid="GPU-b", minor=1, missing=True, base_bytes=MIB),
    )
    installed = Driver.install(tmp_path / "driver", tmp_path / "dev", machine)
    try:
        installed.update(0, errors={"nvmlDeviceGetName": 15})
        left = (tmp_path / "driver" / "gpusim.json").read_text()
        found = Driver.attach(tmp_path / "driver", tmp_path / "dev")
        found.system()
        assert (tmp_path / "driver" / "gpusim.json").read_text() == left
        assert [gpu.uuid for gpu in found.gpus] == ["GPU-a", "GPU-b"]
        assert found.gpus[0].mig == mig
        assert found.gpus[1].missing
    finally:
        installed.remove()


def test_where_no_driver_is_none_is_found(tmp_path: Path) -> None:
    """An error, and no driver without GPUs."""
    with pytest.raises(FileNotFoundError):
        Driver.attach(tmp_path, tmp_path)
