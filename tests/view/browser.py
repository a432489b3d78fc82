"""A headless Chromium, driven through its own protocol over two pipes: no package, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
"""Rules of the WCAG as a program: https://github.com/dequelabs/axe-core"""
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, "Tab": 9, "Enter": 13}


class Browser:
    """One page. `problems` are errors that it has logged, refusals of its policy and failed requests among them."""

    def __init__(self, width: int = 1400, height: int = 860) -> None:
        assert PROGRAM is not None
        self.problems: list[str] = []
        self.answers: list[dict[str, Any]] = []
        """Every response: `url`, `status`, and its seconds from the request to the last byte where that is known."""
        self._sent, self._buffer = 0, b""
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        (given, self._write), (self._read, told) = os.pipe(), os.pipe()
        # Chromium reads commands from 3 and writes to 4, which these numbers must not be.
        to_read, to_write = (fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (given, told))
        command = f'exec "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-'
        flags = (*_FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}")
        self._process = subprocess.Popen(
            ["bash", "-c", command, "chromium", PROGRAM, *flags],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in (given, told, to_read, to_write):
            os.close(number)
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._stack.close()

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        return self._ask(method, given, self._session)

    def _ask(self, method: str, given: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": given} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._sent:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found.get("result", {})
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 2**16)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found.get("method", ""), found.get("params", {}))
        return found

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(told["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.problems.append(str([each.get("value") for each in told["args"]]))
        elif method == "Network.responseReceived":
            response = told["response"]
            self.answers.append({"id": told["requestId"], "url": response["url"], "status": response["status"]})

    def open(self, address: str) -> None:
        """Load a page anew, even if it is open already. `problems` and `answers` are then its own."""
        self.ask("Page.navigate", url="about:blank")
        self.problems.clear()
        self.answers.clear()
        self.ask("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """Return what an expression of JavaScript gives, once its promise is kept."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", found))
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 120) -> Any:
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + seconds
        while True:
            found = self.evaluate(condition)
            if found:
                return found
            assert time.monotonic() < end, f"not within {seconds} s: {condition}; problems: {self.problems}"
            time.sleep(0.02)

    def key(self, name: str, kinds: tuple[str, ...] = ("keyDown", "keyUp")) -> None:
        text = name if len(name) == 1 else ""
        code = _KEYS.get(name, ord(name[0].upper()))
        for kind in kinds:
            given = {"text": text} if kind == "keyDown" and text else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **given)

    def move(self, x: float, y: float) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def faults(self, scheme: str = "light") -> list[str]:
        """Return what axe-core finds that people who use a keyboard or a screen reader, or see little contrast, meet,
        in a colour scheme, `light` or `dark`.
        """
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.evaluate(f"{AXE.read_text(encoding='utf-8')};0")
        told = "({violations}) => violations.map(({id, nodes}) => [id, ...nodes.map(({html}) => html)].join(' '))"
        found: list[str] = self.evaluate(f"axe.run().then({told})")
        self.ask("Emulation.setEmulatedMedia", features=[])
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))
