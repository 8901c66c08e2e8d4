"""An HTTP server on this machine, whose answers a test chooses."""

import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMMIT = "0123456789" * 4
"""Of the models that it has, when it is asked as the hub is."""
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


def send(content: bytes, *, length_bytes: int | None = None, status: int = 200) -> Answer:
    """Answer with this content, announced with another length if one is given."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(length_bytes or len(content)))
        handler.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(content)

    return answer


class Server(http.server.ThreadingHTTPServer):
    """Answers by path, and notes the paths that it is asked for."""

    answers: dict[str, Answer]
    asked: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.answers.get(self.path, send(b"", status=404))(self)

    do_HEAD = do_GET  # noqa: N815  # called by this name

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    """Serve files by their paths, for the length of the block."""
    made = Server(("127.0.0.1", 0), Handler)
    made.answers, made.asked = {path: send(content) for path, content in files.items()}, []
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
