"""`atoll report --watch`: the page on this machine alone, made anew for whoever looks at it."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from atoll.errors import UserError
from atoll.report import html

HOST, DEFAULT_PORT = "127.0.0.1", 8008


def serve(page: Callable[[], str], port: int) -> int:
    """Until Ctrl-C; a run that has no step yet is a page that says so."""
    try:
        server = server_of(page, port)
    except OSError as error:
        raise UserError(
            f"cannot listen at {HOST}:{port}: {error.strerror}", "take another one: --port 8009"
        ) from None
    with server:
        print(
            f"http://{HOST}:{server.server_port}/ shows it as it goes on; Ctrl-C ends", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def server_of(page: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """One that answers on this machine alone, with the page and with nothing else."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            content = _page(page).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the terminal is the user's."""

    return ThreadingHTTPServer((HOST, port), Answer)


def _page(page: Callable[[], str]) -> str:
    try:
        return page()
    except UserError as error:
        return html.page("Nothing to show yet", f"{error.found}; {error.hint}", [], True)
