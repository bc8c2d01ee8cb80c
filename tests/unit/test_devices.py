"""Device numbers: which are NVIDIA's, by the nodes that are there and by /proc/devices."""

import os
import pathlib
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleanslate import devices
from cleanslate.devices import Device, DeviceKind, DeviceNumbers, parse_majors

PROC_DEVICES = """\
Character devices:
  1 mem
  4 /dev/vc/0
195 nvidia-frontend
234 nvidia-caps
235 nvidia-nvswitch
236 nvidia-caps-imex-channels
240 nvidia-uvm
241 nvidiafs
250 notnvidia

Block devices:
  8 sd
195 nvidia-block
"""
MAJORS = {
    195: "nvidia-frontend",
    234: "nvidia-caps",
    235: "nvidia-nvswitch",
    236: "nvidia-caps-imex-channels",
    240: "nvidia-uvm",
    241: "nvidiafs",
}
GPU, CONTROL, UVM, OTHER = DeviceKind.GPU, DeviceKind.CONTROL, DeviceKind.UVM, DeviceKind.OTHER


def test_majors_are_read_from_the_character_devices() -> None:
    """Block devices have numbers of their own; a driver is NVIDIA's if its name begins so."""
    assert parse_majors(PROC_DEVICES) == MAJORS


@pytest.mark.parametrize("text", ["", "Character devices:\n", "Block devices:\n195 nvidia\n", "195\nnvidia\n"])
def test_no_driver_is_no_major(text: str) -> None:
    """A machine without NVIDIA."""
    assert parse_majors(text) == {}


@given(st.text(max_size=300) | st.lists(st.integers(0, 4095).map("{} nvidia".format)).map("\n".join))
def test_majors_of_arbitrary_text_never_fail(text: str) -> None:
    """Every major is a number, every driver NVIDIA's."""
    assert all(major >= 0 and driver.startswith("nvidia") for major, driver in parse_majors(text).items())


@pytest.mark.parametrize(
    ("major", "minor", "kind", "gpu"),
    [
        (195, 0, GPU, 0),
        (195, 7, GPU, 7),
        (195, 255, CONTROL, -1),
        (195, 254, OTHER, -1),
        (240, 0, UVM, -1),
        (240, 1, OTHER, -1),
        (234, 1, OTHER, -1),
        (235, 0, OTHER, -1),
    ],
    ids=["GPU 0", "GPU 7", "control", "modeset", "uvm", "uvm tools", "capability", "switch"],
)
def test_a_number_is_known_by_its_major(major: int, minor: int, kind: DeviceKind, gpu: int) -> None:
    """Also where no node is left, or it lies where nobody looks."""
    numbers = DeviceNumbers(nodes={}, majors=MAJORS)
    assert numbers.device(os.makedev(major, minor)) == Device(kind=kind, minor=gpu)


def test_a_node_that_is_there_goes_before_its_major() -> None:
    """The host's own /dev is nearer to the truth than a convention about minors."""
    odd = os.makedev(195, 3)
    numbers = DeviceNumbers(nodes={odd: Device(kind=CONTROL, minor=-1)}, majors=MAJORS)
    assert numbers.device(odd) == Device(kind=CONTROL, minor=-1)


@pytest.mark.parametrize("number", [0, os.makedev(1, 3), os.makedev(8, 0), os.makedev(4095, 0)])
def test_other_numbers_are_nothing(number: int) -> None:
    """/dev/null and disks are not NVIDIA's."""
    assert DeviceNumbers(nodes={}, majors=MAJORS).device(number) is None


needs_nodes = pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")


@needs_nodes
def test_nodes_are_found_by_name_and_kind_never_by_link(tmp_path: pathlib.Path) -> None:
    """Character devices called nvidia… under the host's /dev and its folder of capabilities; nothing else counts."""
    dev = tmp_path / "dev"
    (dev / "nvidia-caps").mkdir(parents=True)
    made = {
        "nvidia0": (510, 0),
        "nvidia11": (510, 11),
        "nvidiactl": (510, 255),
        "nvidia-uvm": (511, 0),
        "nvidia-modeset": (510, 254),
        "nvidia-caps/nvidia-cap1": (509, 1),
        "tty-nvidia": (508, 0),
    }
    for name, (major, minor) in made.items():
        os.mknod(dev / name, stat.S_IFCHR | 0o600, os.makedev(major, minor))
    (dev / "nvidia5").symlink_to("nvidia0")
    (dev / "nvidia6").write_text("no device")
    found = devices.find_devices(str(tmp_path)).nodes
    assert found == {
        os.makedev(510, 0): Device(kind=GPU, minor=0),
        os.makedev(510, 11): Device(kind=GPU, minor=11),
        os.makedev(510, 255): Device(kind=CONTROL, minor=-1),
        os.makedev(511, 0): Device(kind=UVM, minor=-1),
        os.makedev(510, 254): Device(kind=OTHER, minor=-1),
        os.makedev(509, 1): Device(kind=OTHER, minor=-1),
    }
    assert devices.count_nodes(str(tmp_path)) == 2


def test_no_nodes_are_no_error(tmp_path: pathlib.Path) -> None:
    """A host without GPUs, or without a /dev at all."""
    assert devices.find_devices(str(tmp_path)).nodes == {}
    assert devices.count_nodes(str(tmp_path)) == 0


def test_gpus_are_counted_by_the_drivers_own_list(tmp_path: pathlib.Path) -> None:
    """None where the driver does not tell, which is not zero."""
    (tmp_path / "gpus" / "0000:1b:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:43:00.0").mkdir()
    (tmp_path / "empty").mkdir()
    assert devices.count_gpus(str(tmp_path / "gpus")) == 2
    assert devices.count_gpus(str(tmp_path / "empty")) == 0
    assert devices.count_gpus(str(tmp_path / "nowhere")) is None
