"""A libzmq peer for tests/libzmq.rs: reads one JSON command per line and answers each with one JSON line."""

import json
import sys

import zmq

context = zmq.Context()
sockets = {}


def execute(command):
    op, name = command["op"], command.get("socket")
    if op == "version":
        return zmq.zmq_version()
    if op == "open":
        socket = context.socket(getattr(zmq, command["type"]))
        socket.linger = 0
        for option, value in command.get("options", {}).items():
            socket.setsockopt(getattr(zmq, option), value)
        sockets[name] = socket
        if "connect" in command:
            socket.connect(command["connect"])
            return command["connect"]
        socket.bind(command["bind"])
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if op == "send":
        frames = [bytes.fromhex(frame) for frame in command["frames"]]
        for _ in range(command.get("times", 1)):
            sockets[name].send_multipart(frames)
        return None
    if op == "receive":
        if not sockets[name].poll(10_000):
            raise TimeoutError(name)
        return [frame.hex() for frame in sockets[name].recv_multipart()]
    if op == "close":
        sockets.pop(name).close()
        return None
    raise ValueError(op)


for line in sys.stdin:
    try:
        answer = {"ok": execute(json.loads(line))}
    except Exception as error:
        answer = {"error": repr(error)}
    print(json.dumps(answer), flush=True)
