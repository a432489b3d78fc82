"""The command's own part: it listens at this machine alone, and tells where."""

import http.client
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager

import pytest
import uvicorn

from gigagrad.cli import main
from gigagrad.errors import ConfigError
from gigagrad.view import serving
from gigagrad.view.live import Live
from gigagrad.view.serving import view
from gigagrad.view.slides import Opened, Slides


@contextmanager
def running(monkeypatch, *sources, **settings):
    """Run the command in a thread; give what it told, where it listens, its host with the port, and the token."""
    told: list[str] = []
    servers: list[uvicorn.Server] = []
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            servers.append(self)
            await super().startup(sockets)
            ready.set()

    monkeypatch.setattr(uvicorn, "Server", Server)
    thread = threading.Thread(target=view, args=(sources,), kwargs={"tell": told.append, "browser": False, **settings})
    thread.start()
    try:
        assert ready.wait(120)
        (place,) = [sock.getsockname()[0] for server in servers[0].servers for sock in server.sockets]
        address = next(word for line in told for word in line.split() if word.startswith("http://"))
        _, _, host, token, _ = address.split("/")
        yield told, place, host, token
    finally:
        servers[0].should_exit = True
        thread.join(120)
        assert not thread.is_alive()


def served(monkeypatch, *sources, **settings):
    """Run the command until the page was asked for; return what it told, where, and the page's answer."""
    with (
        running(monkeypatch, *sources, **settings) as (told, place, host, token),
        closing(http.client.HTTPConnection(host, timeout=120)) as connection,
    ):
        connection.request("GET", f"/{token}/catalog")
        answer = connection.getresponse()
        answer.read()
        return told, place, answer


def test_it_listens_at_loopback_and_tells_its_address(page, monkeypatch, jpeg_slide):
    told, place, answer = served(monkeypatch, jpeg_slide)
    assert place == "127.0.0.1"
    assert len(told) == 1
    assert told[0].startswith("1 slide at http://127.0.0.1:")
    assert answer.status == 200
    assert not {"server", "date"} & {name.lower() for name in answer.headers}
    assert served(monkeypatch, jpeg_slide)[0] != told, "every start has a token of its own"


def test_the_first_slide_is_read_before_anybody_asks(page, monkeypatch, jpeg_slide, tmp_path):
    drawn = threading.Event()
    monkeypatch.setattr(Opened, "thumbnail", lambda self: drawn.set())
    served(monkeypatch, jpeg_slide)  # which asks for the catalogue alone
    assert drawn.wait(120)
    (tmp_path / "broken.tif").write_bytes(jpeg_slide.read_bytes()[:1000])
    assert served(monkeypatch, tmp_path / "broken.tif")[2].status == 200
    (tmp_path / "metrics.jsonl").write_text("")
    assert served(monkeypatch, tmp_path)[2].status == 200


def test_elsewhere_it_warns(page, monkeypatch, jpeg_slide):
    told, _, answer = served(monkeypatch, jpeg_slide, host="0.0.0.0")
    assert "nothing is encrypted" in told[0]
    assert answer.status == 200


def test_a_port_that_is_taken_is_told_in_one_line(page, jpeg_slide, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(jpeg_slide), "--port", str(port), "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "choose another --port" in said


def test_a_place_that_there_is_not_is_told(page, jpeg_slide, monkeypatch):
    with pytest.raises(ConfigError, match="expected 1 to 65535"):
        view([jpeg_slide], port=99999, browser=False)

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="Name or service not known; leave out --host"):
        view([jpeg_slide], host="nowhere", browser=False)


def test_without_the_extra_one_line_says_what_to_install(jpeg_slide, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["view", str(jpeg_slide)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'gigagrad[view]'" in said


_FIRST_PICTURE = """
import http.client, sys, threading
import uvicorn
from gigagrad.cli import main
from gigagrad.view import serving

serving.read_page = dict
found = []

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        threading.Thread(target=ask, args=(self, self.config.app, sockets[0].getsockname()[1])).start()

def ask(server, app, port):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for name in ("slides/0", "slides/0/0/0/0/0", "slides/0/1/0/0/0", "slides/0/thumbnail"):
        connection.request("GET", f"/{app._token.decode()}/{name}")
        answer = connection.getresponse()
        answer.read()
        found.append(answer.status)
    server.should_exit = True

uvicorn.Server = Server
code = main(["view", *sys.argv[1:], "--no-browser"])
print(code, found, "torch" in sys.modules)
"""


def test_a_slide_is_shown_without_pytorch(predicted, jpeg_slide, jpeg_label):
    """PyTorch takes seconds to import."""
    for sources in ([jpeg_slide, "--mask", jpeg_label], [predicted]):
        command = [sys.executable, "-c", _FIRST_PICTURE, *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.stdout.splitlines()[-1:] == ["0 [200, 200, 200, 200] False"], done.stderr


def test_of_several_runs_the_networks_predict_and_a_run_without_one_is_told(
    page, monkeypatch, network_dir, jpeg_slide, tmp_path
):
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
        (tmp_path / name / "config.yaml").write_text(f"slides: {jpeg_slide}\n")
    for name in ("one", "two"):
        (tmp_path / name / "best.pt").write_bytes((network_dir / "best.pt").read_bytes())
    made: list[list[Live]] = []

    def slides(items, live):
        made.append(live)
        return Slides(items, live)

    monkeypatch.setattr(serving, "Slides", slides)
    told, _, _ = served(monkeypatch, tmp_path / "one", tmp_path / "two", tmp_path / "three")
    assert [each.name for each in made[0]] == [f"{tmp_path.name}/one", f"{tmp_path.name}/two"]
    assert told[0].startswith(f"warning: {tmp_path.name}/three predicts nothing here: ")
    assert told[1].startswith("1 slide and 3 runs at http")
    served(monkeypatch, tmp_path / "one")
    assert made[1] == [], "a run by itself shows its curves; its network is asked for by --model"


_ENDED_BY = """
import os, signal, sys
import uvicorn
from gigagrad.cli import main
from gigagrad.view import serving

serving.read_page = dict

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        os.kill(os.getpid(), getattr(signal, number))

uvicorn.Server = Server
_, number, slide = sys.argv
sys.argv = ["gigagrad", "view", slide, "--no-browser"]
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_quietly(signal, jpeg_slide):
    """It has nothing to go on from."""
    command = [sys.executable, "-c", _ENDED_BY, signal, str(jpeg_slide)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
