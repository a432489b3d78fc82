"""Many people look at once, some of them slowly: everybody gets everything, and the server logs nothing."""

from __future__ import annotations

import http.client
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.view.test_serving import running

CLIENTS = 64
REQUESTS = 200


@pytest.mark.slow
def test_sixty_four_clients_get_all_that_they_ask_for(page, monkeypatch, predicted, jpeg_label, capfd):
    with running(monkeypatch, predicted, masks=[jpeg_label.parent]) as (_, _, host, token):
        addresses = [f"slides/0/0/{level}/{x}/{y}" for level, x, y in ((0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0))]
        addresses += [f"slides/0/{layer}/0/{x}/0?margin=4" for layer in (1, 2, 4) for x in (0, 1)]
        addresses += ["catalog", "slides/0", "slides/0/thumbnail", "slides/0/3/0/0/0?channel=0"]

        def client(seed: int) -> Counter[int]:
            draw, codes = random.Random(seed), Counter[int]()
            with closing(http.client.HTTPConnection(host, timeout=120)) as connection:
                for _ in range(REQUESTS):
                    pixel = f"slides/0/pixel/{draw.randrange(700)}/{draw.randrange(900)}"
                    connection.request("GET", f"/{token}/{draw.choice([*addresses, pixel])}")
                    answer = connection.getresponse()
                    assert answer.read()
                    codes[answer.status] += 1
            return codes

        with ThreadPoolExecutor(CLIENTS) as threads:
            codes = sum(threads.map(client, range(CLIENTS)), Counter[int]())
    assert codes == {200: CLIENTS * REQUESTS}
    assert not capfd.readouterr().err


def test_clients_that_send_or_read_slowly_keep_nobody_waiting(page, monkeypatch, predicted, capfd):
    with running(monkeypatch, predicted) as (_, _, host, token), ExitStack() as stack:
        name, _, port = host.partition(":")
        request = f"GET /{token}/slides/0/0/0/0/0 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        slow = [stack.enter_context(socket.create_connection((name, int(port)), timeout=120)) for _ in range(CLIENTS)]
        for number, client in enumerate(slow):
            client.sendall(100 * request if number % 2 else request[:-2])  # no one reads; half are not done asking
        with closing(http.client.HTTPConnection(host, timeout=120)) as connection:
            for _ in range(50):
                connection.request("GET", f"/{token}/slides/0/0/0/0/0")
                answer = connection.getresponse()
                assert answer.status == 200
                picture = answer.read()
        slow[0].sendall(request[-2:])
        assert slow[0].recv(12) == b"HTTP/1.1 200"
    assert picture
    assert not capfd.readouterr().err
