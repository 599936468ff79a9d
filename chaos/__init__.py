"""Faults under load: does a caller ever get a wrong answer, somebody else's, or none?

python -m chaos --faults 1000 --seed 7

questions.py  what is asked, and the bytes of its answer, asked alone
callers.py    who asks: the SDK, asyncio's, plain sockets; what became of each call
holders.py    who asks with caches; held.py: their calls, and what each cache must hold, in numpy
sdk_holder.py who asks with the client's caches
load.py       one caller of each kind
service.py    the service as processes that can be hurt, and what they hold; keys.py: its API keys
processes.py, resources.py, clients.py, cached.py, clock.py   the faults
run.py        rounds: load, faults, recovery, a look at what is left
"""
