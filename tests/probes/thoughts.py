"""thoughts.py - what lm-eval needs to measure a policy that thinks: a filter that strips thoughts
before anything is scored, and the scoring of the probes in this directory.

lm-eval finds it beside the task files that name it (`!function thoughts.strip`). It imports nothing
of this project, so that it works in lm-eval's own environment.
"""

import re
import subprocess
import sys


def strip(resps, docs):
    """lm-eval's custom filter: of every response, what is left without its thought. The thought
    ends at the first </think>; one that was cut before it leaves nothing, since the user would have
    seen nothing either. A response without tags stays as it is."""

    def visible(text):
        head, end, tail = text.partition("</think>")
        return (tail if end else "" if "<think>" in head else text).strip()

    return [[visible(text) for text in texts] for texts in resps]


def answers(doc, results):
    """The last number in the answer is the right one."""
    numbers = re.findall(r"-?\d+", results[0].replace(",", ""))
    return {"exact_match": float(bool(numbers) and numbers[-1] == doc["answer"])}


def obeys(doc, results):
    """So many words, and a letter that must not occur: counted over the whole answer."""
    words = results[0].lower().split()
    return {"obeyed": float(len(words) == doc["words"] and doc["letter"] not in "".join(words))}


def runs(doc, results):
    """The code in the answer passes its test, in a process of its own, within three seconds. (The
    code is a model's: run it where it can do no harm.)"""
    block = re.search(r"```(?:python)?\n(.*?)```", results[0], re.S)
    code = (block.group(1) if block else results[0]) + "\n" + doc["test"]
    try:
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=3)
    except subprocess.TimeoutExpired:
        return {"passed": 0.0}
    return {"passed": float(done.returncode == 0)}
