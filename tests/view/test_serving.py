"""The command's own part: it listens at this machine alone, and tells where."""

import http.client
import socket
import sys
import threading
from contextlib import closing

import pytest
import uvicorn

from gigagrad.cli import main
from gigagrad.errors import ConfigError
from gigagrad.view import serving
from gigagrad.view.serving import view
from tests.view.conftest import PAGE


@pytest.fixture
def page(monkeypatch):
    monkeypatch.setattr(serving, "read_page", lambda: PAGE)


def served(monkeypatch, *sources, **settings):
    """Run the command in a thread until the page was asked for; return what it told, and the page's answer."""
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
        with closing(http.client.HTTPConnection(host, timeout=120)) as connection:
            connection.request("GET", f"/{token}/catalog")
            answer = connection.getresponse()
            answer.read()
        return told, place, answer
    finally:
        servers[0].should_exit = True
        thread.join(120)
        assert not thread.is_alive()


def test_it_listens_at_loopback_and_tells_its_address(page, monkeypatch, jpeg_slide):
    told, place, answer = served(monkeypatch, jpeg_slide)
    assert place == "127.0.0.1"
    assert len(told) == 1
    assert told[0].startswith("1 slide at http://127.0.0.1:")
    assert answer.status == 200
    assert not {"server", "date"} & {name.lower() for name in answer.headers}
    assert served(monkeypatch, jpeg_slide)[0] != told, "every start has a token of its own"


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
