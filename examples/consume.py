"""Consume a topic over REST with Python's standard library: no Django, no packages (Python 3.11 or newer).

    RMQ_URL=http://127.0.0.1:8000/api/rmq RMQ_TOKEN=... python consume.py TOPIC [COUNT]

Ends after COUNT messages (default: never). SIGTERM or Ctrl-C ends it after the message in hand. If `work` raises an
exception, the message is retried as the settings of the topic say.
"""

import http.client
import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
import uuid

CONSUMER = str(uuid.uuid4())
TROUBLE = (OSError, ValueError, http.client.HTTPException)
stopping = threading.Event()


def work(message):
    """Process one message. Replace this."""
    print(json.dumps(message["body"]), flush=True)


def post(verb, body):
    """Return the answer to a request."""
    headers = {"Authorization": f"Token {os.environ['RMQ_TOKEN']}", "Content-Type": "application/json"}
    url = f"{os.environ['RMQ_URL']}/v1/topics/{sys.argv[1]}/{verb}/"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def until_answered(verb, body):
    """Repeat a request until it is answered: after Retry-After, or after 1, 2, 4 ... 30 seconds."""
    pause, asked = 1, body
    while True:
        try:
            return post(verb, asked)
        except TROUBLE as error:
            code, after, text = 0, "", str(error)
            if isinstance(error, urllib.error.HTTPError):
                code, after = error.code, error.headers.get("Retry-After") or ""
                text = f"{code} {error.read(1000).decode(errors='replace')}"
            is_final = 400 <= code < 500 and code != 429 and not after
            if stopping.is_set() and verb == "prepare":
                sys.exit()
            if (is_final and asked is body) or (stopping.is_set() and pause > 1):
                sys.exit(f"{verb}: {text}")  # deliveries in hand time out and come again
            print(f"{verb}: {text}", file=sys.stderr, flush=True)
            stopping.wait(int(after) if after.isdigit() else pause)
            pause = min(30, pause * 2)
            if verb == "prepare":  # what did it take? Only topics with SERIAL know, others answer 409
                asked = body if is_final else {"consumer": CONSUMER, "held": True}


def extend(waiting, seconds, done):
    """Restart the time-outs of the deliveries in hand until the work on them is done."""
    while not done.wait(seconds):
        try:
            post("extend", {"deliveries": list(waiting)})
        except TROUBLE as error:
            print(f"extend: {error}", file=sys.stderr, flush=True)


def process(messages, timeout):
    """Work on messages one after the other and settle each. Return their number."""
    waiting, done = [{"id": one["id"], "receipt": one["receipt"]} for one in messages], threading.Event()
    threading.Thread(target=extend, args=(waiting, timeout / 3, done), daemon=True).start()
    while waiting and not stopping.is_set():
        delivery, verb = waiting[0], "commit"
        try:
            work(messages[-len(waiting)])
        except Exception as error:
            delivery, verb = {**delivery, "error": f"{type(error).__name__}: {error}"}, "rollback"
        answer = until_answered(verb, {"deliveries": [delivery]})
        if answer["outcomes"].get("stale"):
            print(f"{verb}: {delivery['id']} had ended before", file=sys.stderr, flush=True)
        del waiting[0]
    done.set()
    if waiting:  # it was not started, so this uses no retry
        until_answered("release", {"deliveries": waiting})
    return len(messages) - len(waiting)


if __name__ == "__main__":
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.set())
    left = float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
    while left > 0 and not stopping.is_set():
        # SIGTERM is heard when the answer has come, so do not wait for long.
        taken = until_answered("prepare", {"consumer": CONSUMER, "max": int(min(left, 10)), "wait": 5})
        if taken["messages"]:
            left -= process(taken["messages"], taken["timeout"])
        elif taken["wait_refused"]:
            stopping.wait(1)
