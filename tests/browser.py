"""A headless Chromium, driven over its debugging protocol: opens a page, asks it, points at it, types into it."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Final

from websockets.sync.client import ClientConnection, connect

PROGRAM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS: Final = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-port=0"
)
_LOADED_S: Final = 30


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in `folder`; it ends with the block."""
    assert PROGRAM is not None, "there is no Chromium on this machine"
    command = [PROGRAM, *_FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"ws://\S+", line) for line in process.stderr)), None)
            assert found, "Chromium ended before it could be driven"
            with connect(found[0], max_size=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()


class Browser:
    """One page of the browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.numbers = itertools.count(1)
        self.session = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol and its result; what the page reports meanwhile is kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            answer = json.loads(self.socket.recv(timeout=30))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(details))
            case "Runtime.consoleAPICalled" if details["type"] in {"error", "warning", "assert"}:
                self.complaints.append(json.dumps(details["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and whether its user prefers the dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Load a page to its end."""
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        end = monotonic() + _LOADED_S
        while (found := self.ask("document.readyState + location.href")) != "complete" + url:
            assert monotonic() < end, f"{url} is still {found}"

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the pointer there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """A key, down and up."""
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
