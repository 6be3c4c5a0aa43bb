"""A program that attaches to an engine and is killed while its requests run."""

ATTACHED = """
import os, signal, sys, time
from qllm import QLLMEngine, SamplingParams
engine = QLLMEngine.attach(sys.argv[1])
sampling = SamplingParams(temperature=0, ignore_eos=True)
handles = [engine.submit("abc", p, 1500, sampling=sampling) for p in ("LS", "BE", "BE")]
next(iter(handles[0]))
print(handles[0].number, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
