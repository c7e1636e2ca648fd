"""A peer that speaks HTTP/2 by hand: it may open windows that it does not, and send half of what it announces."""

import contextlib
import socket
import struct
import threading
import time

HEADERS, DATA, SETTINGS, WINDOW_UPDATE, PING, RST_STREAM, GOAWAY = 1, 0, 4, 8, 6, 3, 7
END_STREAM = ACK = 1
END_HEADERS = 4
INITIAL_WINDOW = 4  # a setting
WINDOW = 65_535  # of HTTP/2 by default
PIECE = 16_384


def message(data: bytes, announced: int | None = None) -> bytes:
    """Returns a message of gRPC, which announces its own length or another one."""
    return struct.pack(">BI", 0, len(data) if announced is None else announced) + data


def _frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


def _text(text: str) -> bytes:
    data, length = text.encode(), len(text)
    if length < 127:
        return bytes([length]) + data
    rest = length - 127
    return bytes([127, rest & 127 | 128, rest >> 7] if rest >> 7 else [127, rest]) + data


class RawHttp2:
    """One connection. Its streams have windows of `window` bytes for what the server sends."""

    def __init__(self, endpoint: str, window: int = WINDOW) -> None:
        host, _, port = endpoint.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._initial, self._connection = WINDOW, WINDOW
        self._given: dict[int, int] = {}  # by stream: window beyond the initial one
        self.ended: dict[int, bytes] = {}
        """By stream: the last headers or reset that the server sent."""
        self.closed = False
        """Whether the server has ended the connection."""
        settings = _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, window))
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, stream: int, path: str, data: bytes | None, secret: str = "", end: bool = True) -> None:
        """Begins a call: its headers, and a message that fits the window; None for headers alone."""
        fields = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": "test", "te": "trailers",
            "content-type": "application/grpc",
        }  # fmt: skip
        if secret:
            fields["authorization"] = f"Bearer {secret}"
        block = b"".join(b"\0" + _text(key) + _text(value) for key, value in fields.items())
        frames = _frame(HEADERS, END_HEADERS, stream, block)
        if data is not None:
            frames += _frame(DATA, END_STREAM if end else 0, stream, data)
        self._send(frames)

    def send(self, stream: int, data: bytes, seconds: float) -> int:
        """Sends as much of the data as the server takes within a time. Returns how much."""
        sent, until = 0, time.monotonic() + seconds
        while sent < len(data) and time.monotonic() < until and stream not in self.ended and not self.closed:
            with self._changed:
                window = min(self._initial + self._given.get(stream, 0) - sent, self._connection)
                if window <= 0:
                    self._changed.wait(0.05)
                    continue
                piece = data[sent : sent + min(window, PIECE)]
                self._connection -= len(piece)
            try:
                self._send(_frame(DATA, 0, stream, piece))
            except OSError:
                break
            sent += len(piece)
        return sent

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the server may have ended it
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone ends nothing while the other thread reads
        self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._sending:
            self._socket.sendall(data)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (more := self._socket.recv(size - len(data))):
                raise ConnectionError
            data += more
        return data

    def _read(self) -> None:
        try:
            self._socket.settimeout(None)
            while True:
                head = self._exactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                data = self._exactly(int.from_bytes(head[:3], "big"))
                if kind == PING and not flags & ACK:
                    self._send(_frame(PING, ACK, 0, data))
                with self._changed:
                    self._take(kind, flags, stream, data)
                    self._changed.notify_all()
                if kind == SETTINGS and not flags & ACK:
                    self._send(_frame(SETTINGS, ACK, 0))
        except (OSError, ValueError):
            self.closed = True

    def _take(self, kind: int, flags: int, stream: int, data: bytes) -> None:
        if kind == WINDOW_UPDATE and stream:
            self._given[stream] = self._given.get(stream, 0) + int.from_bytes(data, "big")
        elif kind == WINDOW_UPDATE:
            self._connection += int.from_bytes(data, "big")
        elif kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", data):
                if name == INITIAL_WINDOW:
                    self._initial = value
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended[stream] = data
