"""Inject faults under load, and check that no caller gets a wrong answer, another caller's answer, or no answer.

python -m chaos --faults 1000 --seed 7

questions.py  requests, and the bytes that an idle service answers
callers.py    callers with the SDK, asyncio's client and plain sockets; the outcome of each call
holders.py    callers with caches; held.py: calls over caches, and a model of a cache in numpy
sdk_holder.py a caller with the client's caches
load.py       one caller of each kind
service.py    the service's processes and their resources; keys.py: its API keys
processes.py, resources.py, clients.py, cached.py, clock.py   the faults
run.py        rounds: load, faults, recovery, a check for resources that were not released
"""
