"""server.py - an OpenAI-compatible model server on loopback, with the toy's scripted model behind
it, for tests: with every fault that a long run will meet.

    python tests/server.py --latency 0.2    prints its URL, serves until it is killed

A real server over real sockets: status codes, headers and refused connections are what the client
sees, not what somebody thinks it would see.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path[:0] = map(str, (Path(__file__).resolve().parent.parent, Path(__file__).resolve().parent))
from players.check import CHECK_REPLIES

from answering import CODE, coded, feeling, saying
from toy import world

GARBAGE = ["", "I would rather not say.", '[{"change": 5}]', '{"change": 5}', '{"content": "cut']
SOON = {"Retry-After": "0.01"}
FORMATS = ("json_schema", "json_object", "text")


class Loopback(ThreadingHTTPServer):
    """faults: {"429": share, "500": share, "garbage": share, "hang": share}, of the calls, drawn by
    a seed. latency: seconds a call. outage: (after so many calls, seconds): then connections are
    cut without an answer. formats: what it takes as response_format; "text" stands for none, and
    the rest is refused. answer: a function of the prompt, instead of the scripted model; in place
    of answering.CODE its text gets the prompt's code. reply: a function of the request that returns
    (status, headers, body), instead of everything. What a program asks first, its check, is
    answered as it should be, and not counted.

    At the end of its `with` it raises AssertionError if a request asked for its form wrongly."""

    daemon_threads = True
    request_queue_size = 256

    latency, faults, outage, formats = 0.0, {}, None, FORMATS
    answer = reply = key = None

    def __init__(self, difficulty="vanilla", **options):
        super().__init__(("127.0.0.1", 0), Handler)
        vars(self).update(options)
        self.model = world.ScriptedModel(difficulty)
        self.rng, self.lock = random.Random(0), threading.Lock()
        self.prompts = []  # but for the check's
        self.requests = 0  # the check's, too
        self.refused = 0  # requests for a form that it does not take
        self.wrong = []  # what was wrong with the form that a request asked for
        self.active, self.most = 0, 0  # calls under way now, and at most
        self.down_until = 0.0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def calls(self):
        return len(self.prompts)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
        assert not self.wrong, self.wrong[0]

    def handle_error(self, request, address):  # a client that gave up waiting is no news
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            fault = self.count_and_draw(request["messages"][0]["content"])
        try:
            if time.monotonic() < server.down_until:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            time.sleep(30 if fault == "hang" else server.latency)
            if server.reply:
                self.send(*server.reply(request))
            else:
                refusal = self.refusal(request, fault)
                self.send(*refusal or (200, {}, completion(self.text_for(request, fault))))
        finally:
            with server.lock:
                server.active -= 1

    def count_and_draw(self, prompt):
        """Count the call and draw its fault, a key of `faults` or None."""
        server = self.server
        server.active += 1
        server.requests += 1
        server.most = max(server.most, server.active)
        if not check_change(prompt):
            server.prompts.append(prompt)
        if server.outage and server.calls == server.outage[0]:
            server.down_until = time.monotonic() + server.outage[1]
        drawn = [name for name, share in server.faults.items() if server.rng.random() < share]
        return drawn[0] if drawn else None

    def refusal(self, request, fault):
        """(status, headers, body) of a call that is refused, or None."""
        key = self.headers["Authorization"]
        if self.server.key and key != f"Bearer {self.server.key}":
            return failure(401, f"Incorrect API key: {key}")
        if fault in ("429", "500"):
            return failure(int(fault), "slow down", SOON)
        if request["model"] != "scripted":
            return failure(404, f"The model `{request['model']}` does not exist.")
        form = request.get("response_format", {"type": "text"})["type"]
        if form not in self.server.formats:
            self.server.refused += 1
            return failure(400, f"response_format {form} is not supported")
        return None

    def text_for(self, request, fault):
        """What the model says to a request."""
        server, prompt = self.server, request["messages"][0]["content"]
        if check := check_change(prompt):
            text = coded(prompt, feeling(check)).replace('"reason": "t", ', "")
        elif fault == "garbage":
            return server.rng.choice(GARBAGE)
        elif server.answer:
            text = server.answer(prompt)
            return coded(prompt, text) if CODE in text else text
        else:
            text = asyncio.run(server.model(prompt))
        try:
            check_form(request, text)
        except (AssertionError, KeyError) as error:
            server.wrong.append(repr(error))
        return text

    def send(self, status, headers, body):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for header in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)


def check_form(request, text):
    """Raise AssertionError or KeyError if a request asks for another form than that of `text`."""
    form = request.get("response_format")
    if form is None:
        return
    # without this word OpenAI's servers refuse "json_object"
    assert "JSON" in request["messages"][0]["content"], "the prompt does not say JSON"
    if form["type"] == "json_schema":
        named, answer = form["json_schema"], json.loads(text)
        assert named["strict"] is True and named["name"], named
        types = {str: "string", int: "integer", bool: "boolean"}
        properties = {key: {"type": types[type(value)]} for key, value in answer.items()}
        closed = {"required": list(answer), "additionalProperties": False}
        assert named["schema"] == {"type": "object", "properties": properties, **closed}, named
        assert list(named["schema"]["properties"]) == list(answer), "the keys are in another order"


def people(path, split="train", count=None):
    """The file `path`, with `count` users of the toy (default: all)."""
    path.write_text("".join(json.dumps(row) + "\n" for row in world.profiles(split, count)))
    return path


def toy_people(directory):
    """The toy's users as files, for a server's simulator, which must be told whom it plays. Returns
    the flags."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [people(directory / f"toy-{split}.jsonl", split) for split in ("train", "heldout")]
    return ["--profiles", *map(str, files)]


def check_change(prompt):
    """The change for what a program asks first, before anything is paid for; 0 for all else. Here a
    kind reply lifts, and a cruel one does not."""
    kind, cruel = CHECK_REPLIES["en"]
    return (kind in prompt) - (cruel in prompt)


def mild_answer(prompt):
    """A user whom nothing upsets, and who never leaves: the same change and line for ever. For
    measuring, where every dialogue must take all its turns."""
    return saying("Hm, go on.") if "<emotion_level>" in prompt else feeling(1)


def failure(status, message, headers=None):
    """(status, headers, body) of an error as OpenAI's servers word it."""
    return status, headers or {}, {"error": {"message": message}}


def completion(text, finish_reason="stop", error=None, **more):
    """The body of an answer, with `more` in its message, or with an error in its choice."""
    message = {"role": "assistant", "content": text, **more}
    choice = {"index": 0, "finish_reason": finish_reason, "message": message}
    return {"choices": [{**choice, "error": error} if error else choice]}


def start(*flags):
    """The server in a process of its own, so that it takes no time from who is measured. Returns
    (process, URL)."""
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, flags)], stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--faults", type=json.loads, default={})
    parser.add_argument("--outage", type=json.loads)
    parser.add_argument("--steady", action="store_true", help="a user who never leaves")
    flags = vars(parser.parse_args())
    with Loopback(answer=mild_answer if flags.pop("steady") else None, **flags) as server:
        print(server.url, flush=True)
        threading.Event().wait()
