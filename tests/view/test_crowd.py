"""Many people look at once: everybody gets everything, and the server logs nothing."""

from __future__ import annotations

import http.client
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.view.test_serving import running

CLIENTS = 64
REQUESTS = 200


@pytest.mark.slow
def test_sixty_four_clients_get_all_that_they_ask_for(page, monkeypatch, predicted, jpeg_label, capfd):
    with running(monkeypatch, predicted, masks=[jpeg_label.parent]) as (_, _, host, token):
        addresses = [f"slides/0/0/{level}/{x}/{y}" for level, x, y in ((0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0))]
        addresses += [f"slides/0/{layer}/0/{x}/0?form=outline" for layer in (1, 2, 4) for x in (0, 1)]
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
