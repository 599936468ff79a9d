"""Our protobuf messages equal those of the Open Inference Protocol."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_server.oip.grpc import protos
from tests.support.oip.grpc_calls import HANG

CLIENTS = Path(__file__).parent / "clients"


def test_our_messages_are_the_protocols_own():
    """Our messages equal those of tritonclient, and one process can load both."""
    program = CLIENTS / "proto_differences.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_descriptor_set_is_of_the_files(tmp_path):
    """The stored descriptor set equals the compiled .proto files. If the test fails, run `make protos`."""
    folder, made = Path(protos.__file__).parent, tmp_path / "made"
    protoc = Path(sys.executable).with_name("protoc")
    subprocess.run(
        [protoc, "-I", folder, f"--descriptor_set_out={made}", "inference.proto", "health.proto"], check=True
    )
    assert made.read_bytes() == (folder / "descriptors.binpb").read_bytes()
