"""The watchdog of the event loop notes what takes CPU time in one step: coroutines, callbacks and protocols."""

import json
import os
import subprocess
import sys

PROGRAM = """
import asyncio, gc, os, time
from flashpoint_server.http import steps

def burn(seconds=0.03):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

class Slow(asyncio.Protocol):
    def data_received(self, data):
        burn()
        asyncio.get_running_loop().stop()

async def early():
    burn()

async def long():
    await asyncio.sleep(0)
    burn()

async def short():
    for _ in range(30):
        burn(0.001)
        await asyncio.sleep(0)

async def idle():
    time.sleep(0.05)

async def collects():
    gc.collect()

async def serve():
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    loop.add_reader(ours, reader, ours)
    loop.call_later(0, timer)
    await asyncio.to_thread(lambda: loop.call_soon_threadsafe(other))
    server = await loop.create_server(Slow, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"x")

def reader(descriptor):
    loop.remove_reader(descriptor)
    burn()

def timer():
    burn()

def other():
    burn()

loop = steps.loop_class(Slow)(1.0)
asyncio.set_event_loop(loop)
gc.disable()
many = [[] for _ in range(1_000_000)]  # a collection scans them, which takes over 5 ms
loop.run_until_complete(early())
steps.listening()
for work in (long, short, idle, collects):
    loop.run_until_complete(work())
serving = loop.create_task(serve())
loop.run_forever()
"""


def test_long_steps_are_noted_by_name_without_start_up_waits_and_garbage_collection(tmp_path):
    file = tmp_path / "steps"
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | {"_FLASHPOINT_STEPS": str(file)}, check=True)
    noted = {line["step"]: line["seconds"] for line in map(json.loads, file.read_text().splitlines())}
    assert {"long", "reader", "timer", "other", "Slow.data_received"} <= set(noted)
    assert not {"early", "short", "idle", "collects"} & set(noted)
    assert all(noted[name] >= 0.03 for name in ("long", "reader", "timer", "other", "Slow.data_received"))
