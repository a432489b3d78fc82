"""Nobody but the page's own user gets anything, and nothing but what the command named."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tifffile

from tests.view.conftest import TOKEN

TILE = "slides/0/0/0/0/0"
BROWSER = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}


@pytest.fixture
def client(serve, jpeg_slide):
    return serve(jpeg_slide)


@pytest.mark.parametrize(
    "address", ["", "page.js", "page.css", "icon.svg", "licences.txt", "catalog", "slides/0", TILE]
)
def test_the_page_gets_what_it_asks_for(client, address):
    answer = client.get(address, headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'"
    )
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "set-cookie" not in answer.headers
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "address",
    [
        "/",
        "/catalog",
        f"/{TILE}",
        f"/{TOKEN}",
        f"/{TOKEN[:-1]}/catalog",
        f"/{TOKEN}x/catalog",
        f"/{TOKEN.upper()}/catalog",
        f"//{TOKEN}/catalog",
        f"/catalog?token={TOKEN}",
        "/\N{SNOWMAN}/catalog",
    ],
)
def test_without_the_token_nothing_is_told(client, address):
    answer = client.get(f"http://127.0.0.1:8000{address}")
    assert answer.status_code == 403
    assert "the one that 'gigagrad view' printed" in answer.text
    assert answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    "address",
    [
        "../../etc/passwd",
        "slides/../../../etc/passwd",
        "slides/%2e%2e/%2e%2e/etc/passwd",
        "%2fetc%2fpasswd",
        "slides/0/0/0/0/..%2f..%2fsecret",
        "page.js/../../secret.txt",
        "slides/..%5c..%5csecret",
        "slides/0%00/0/0/0/0",
        "/etc/passwd",
        "secret.txt",
        "index.html",
        "slides/-1",
        "slides/1",
        "slides/99999999999999999999999",
        "slides/0/9/0/0/0",
        "slides/0/0/99/0/0",
        "slides/0/0/0/5/5",
        "slides/0/0/0/-1/0",
        "runs/0/0",
    ],
)
def test_an_address_is_no_path(client, address, jpeg_slide):
    jpeg_slide.with_name("secret.txt").write_text("secret")
    answer = client.get(f"http://127.0.0.1:8000/{TOKEN}/{address}")
    assert answer.status_code in (403, 404)
    assert "secret" not in answer.text.replace("secret token", "")
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8000"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
        {"sec-fetch-site": "something-new"},
    ],
)
def test_another_site_gets_nothing_even_with_the_token(client, headers):
    answer = client.get(TILE, headers=headers)
    assert answer.status_code == 403
    assert "another site" in answer.text


def test_a_link_to_the_page_may_be_followed_and_the_page_may_not_be_framed(client):
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    answer = client.get("", headers=followed)
    assert answer.status_code == 200
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert client.get("", headers={**followed, "sec-fetch-dest": "iframe"}).status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "", "a b"]
)
def test_a_foreign_host_is_refused(client, host):
    answer = client.get(TILE, headers={"host": host})
    assert answer.status_code == 421
    assert "'gigagrad view' printed" in answer.text


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:1234", "LOCALHOST", "[::1]:8000", "[::1]", "192.168.1.5:80"]
)
def test_own_names_at_any_port_are_served(client, host):
    assert client.get("catalog", headers={"host": host}).status_code == 200


def test_a_name_that_the_command_was_given_is_its_own(serve, jpeg_slide):
    client = serve(jpeg_slide, host="slides.example")
    assert client.get("catalog", headers={"host": "slides.example:80"}).status_code == 200
    assert client.get("catalog", headers={"host": "other.example"}).status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_nothing_can_be_changed(client, method):
    assert client.request(method, TILE).status_code == 405


def test_a_huge_request_is_refused_before_anything_is_made_of_it(client):
    assert client.get("catalog?" + "x" * 2000).status_code == 414
    assert client.get("slides/" + "0" * 1000).status_code == 414
    assert client.get("catalog", headers={"x-large": "x" * 2**15}).status_code == 431
    assert client.get("catalog", headers={f"x-{number}": "" for number in range(200)}).status_code == 431
    assert client.request("GET", "catalog", content=b"x" * 10).status_code == 413


@pytest.mark.parametrize(
    "query",
    [
        *("channel=a", "channel=-1", "channel=123456", "channel=", "channel=1&x=1", "margin=17", "margin=000001"),
        *("margin=\u0664", "path=/etc/passwd", "layer=1", "live=2"),
    ],
)
def test_unknown_words_behind_an_address_are_refused_in_one_line(client, query):
    answer = client.get(f"{TILE}?{query}")
    assert answer.status_code == 400
    assert answer.text.count("\n") == 1
    assert "expected a small number for channel or margin or live" in answer.text


def test_a_slide_that_has_become_a_link_is_not_opened(serve, jpeg_slide, tmp_path):
    slide, other = tmp_path / "slide.tif", tmp_path / "other.tif"
    slide.write_bytes(jpeg_slide.read_bytes())
    other.write_bytes(jpeg_slide.read_bytes())
    client = serve(slide)
    slide.unlink()
    os.symlink(other, slide)
    answer = client.get("slides/0")
    assert answer.status_code == 422
    assert "slide.tif is gone or has become a link" in answer.text
    assert str(tmp_path) not in answer.text


def test_many_clients_get_the_same_picture(client):
    expected = client.get(TILE).content
    addresses = [TILE, "slides/0/0/1/0/0", "slides/0/thumbnail", "slides/0/pixel/5/7"] * 16
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(client.get, addresses))
    assert [answer.status_code for answer in answers] == [200] * 64
    assert all(answer.content == expected for answer in answers[::4])


def test_a_pixel_that_is_no_number_is_told_as_none(serve, tmp_path):
    pixels = np.zeros((20, 30), np.float32)
    pixels[2, 3] = np.nan
    tifffile.imwrite(tmp_path / "floats.tif", pixels, tile=(16, 16))
    client = serve(tmp_path / "floats.tif")
    assert [client.get(f"slides/0/pixel/2/{x}").json()["pixel"] for x in (3, 4)] == [[None], [0.0]]
    assert client.get(TILE).status_code == 200
