"""A metadata server of a cloud, pretended by a thread."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

Answer = tuple[int, str, dict[str, str]]
"""Status, text and headers; status 0 for a connection that is closed without an answer."""
TOKEN = "a-token=="
ENDS = {
    "aws": "AWS announced the end of this instance at 2026-11-29T18:02:00Z (terminate)",
    "gcp": "GCP announced the end of this instance in 30 seconds or less",
    "azure": "AZURE announced the end of this instance at Sun, 29 Nov 2026 18:02:00 GMT",
}
"""What a user is told of the notice that each cloud's server gives."""
OF_AZURE = {
    "EventId": "A123",
    "EventType": "Preempt",
    "EventStatus": "Scheduled",
    "ResourceType": "VirtualMachine",
    "Resources": ["other", "Node-2"],
    "NotBefore": "Sun, 29 Nov 2026 18:02:00 GMT",
}


def answered(cloud: str, ends: bool, handler: BaseHTTPRequestHandler) -> Answer:
    """What the real server answers: see the documents of each cloud."""
    asked, headers = f"{handler.command} {handler.path}", handler.headers
    if cloud == "aws":
        if asked == "PUT /latest/api/token":
            has_limit = headers["X-aws-ec2-metadata-token-ttl-seconds"].isdecimal()
            return (200, TOKEN, {}) if has_limit else (400, "", {})
        if headers["X-aws-ec2-metadata-token"] != TOKEN:
            return 401, "Unauthorized", {}
        if ends and asked == "GET /latest/meta-data/spot/instance-action":
            return 200, '{"action": "terminate", "time": "2026-11-29T18:02:00Z"}', {}
    if cloud == "gcp" and asked == "GET /computeMetadata/v1/instance/preempted":
        if headers["Metadata-Flavor"] != "Google":
            return 403, "", {}
        return 200, "TRUE" if ends else "FALSE", {}
    if cloud == "azure":
        if headers["Metadata"] != "true":
            return 400, "", {}
        if asked == "GET /metadata/scheduledevents?api-version=2020-07-01":
            others = [OF_AZURE | {"EventType": "Reboot"}, OF_AZURE | {"Resources": ["node-1"]}]
            events = [*others, *([OF_AZURE] if ends else [])]
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}), {}
        if handler.path.startswith("/metadata/instance/compute/name?"):
            return 200, "node-2", {}
    return 404, "<html>not found</html>", {}


@contextmanager
def metadata_server(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> Iterator[str]:
    """Gives the address of a server in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            status, text, headers = answer(self)
            if not status:
                return  # without an answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode(errors="surrogateescape"))

        do_GET = do_PUT = reply  # noqa: N815

        def log_message(self, *about: object) -> None:
            """On no terminal."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
