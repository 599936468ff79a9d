"""The memory in use and its limit are those of the nearest control group with a limit, or of the machine."""

import pytest

from flashpoint_server.observability.memory import MemoryUse, memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:    400 kB\n"


@pytest.fixture
def system(tmp_path):
    """Return a function that writes /proc and control groups, given as {path: (limit, current, inactive_file)}."""

    def write(place, groups):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(place)
        (tmp_path / "proc/meminfo").write_text(MEMINFO)
        for path, (limit, current, inactive) in groups.items():
            folder = tmp_path / "groups" / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{current}\n")
            (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
        return memory(tmp_path / "groups", tmp_path / "proc")

    return write


@pytest.mark.parametrize(
    ("place", "groups", "expected"),
    [
        ("0::/\n", {"": (500, 300, 100)}, MemoryUse(200, 500)),  # in a container
        ("0::/system.slice/f.service\n", {"system.slice/f.service": (800, 700, 50)}, MemoryUse(650, 800)),
        ("0::/a/b\n", {"a": (1000, 900, 0), "a/b": ("max", 100, 0)}, MemoryUse(900, 1000)),  # its parent's limit
        ("0::/a/b\n", {"a": (1000, 500, 0), "a/b": (200, 180, 0)}, MemoryUse(180, 200)),  # the one that is nearest
        ("0::/a\n", {"a": ("max", 100, 0)}, MemoryUse(600 << 10, 1000 << 10)),
        ("1:name=systemd:/a\n", {}, MemoryUse(600 << 10, 1000 << 10)),  # control groups of version 1
        ("0::/a\n", {"a": (500, 20, 50)}, MemoryUse(0, 500)),
    ],
)
def test_the_nearest_limit_counts(system, place, groups, expected):
    assert system(place, groups) == expected


def test_it_is_unknown_without_proc(tmp_path):
    assert memory(tmp_path, tmp_path) is None


def test_a_server_exports_its_memory_with_a_limit(server):
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    values = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith(("flashpoint_memory_", "flashpoint_certificate_"))
    }
    assert 0 < values["flashpoint_memory_bytes"] <= values["flashpoint_memory_limit_bytes"]
    assert values["flashpoint_certificate_expiry_timestamp_seconds"] == 0
