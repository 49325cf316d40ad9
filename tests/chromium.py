"""A headless Chromium, driven through the two pipes of its debugging protocol.

Nothing but the standard library: `--remote-debugging-pipe` reads JSON from descriptor 3 and writes
it to descriptor 4, each message ended by a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 60.0  # a machine may be busy; what is there is seen at once
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # its sandbox doesn't start where tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
# What a reader may press, and what a browser wants to know of it.
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
SHIFT = 8


def executable() -> str | None:
    """A Chromium: what `DUOKA_CHROMIUM` says, or one on PATH."""
    if named := os.environ.get("DUOKA_CHROMIUM"):
        return named
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A running browser. `Page`s of it have nothing in common: no storage, no cookies."""

    def __init__(self, path: str, profile: Path) -> None:
        # Away from 3 and 4, which the child's ends become.
        pipes = [os.pipe() for _ in range(2)]
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in pipes for end in pipe]
        for end in [end for pipe in pipes for end in pipe]:
            os.close(end)
        child_reads, self._to, self._from, child_writes = ends
        with (profile / "chromium.log").open("wb") as log:
            self._process = os.posix_spawn(
                path,
                [path, *ARGUMENTS, f"--user-data-dir={profile}"],
                os.environ,
                setpgroup=0,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                    (os.POSIX_SPAWN_DUP2, child_reads, 3),
                    (os.POSIX_SPAWN_DUP2, child_writes, 4),
                ],
            )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """What a method returns; events that come meanwhile are put by."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._from], [], [], SECONDS)
            assert readable, "the browser says nothing"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        value: dict[str, Any] = json.loads(message)
        return value

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1440, **look: Any) -> Iterator[Page]:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, session["sessionId"])
        try:
            page.open(url, width=width, **look)
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """A tab, as a reader has it: they click, type and look."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(
        self,
        url: str,
        *,
        width: int,
        height: int = 900,
        dark: bool = False,
        language: str = "en-US",
    ) -> None:
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            self.call(f"{domain}.enable")
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        agent = self.call("Runtime.evaluate", expression="navigator.userAgent")["result"]["value"]
        self.call("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Until an expression is true, and what it is."""
        end = time.monotonic() + SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never so: {expression}\n{self.text()[-2000:]}"
            time.sleep(0.02)
        return value

    def text(self, selector: str = "body") -> str:
        text: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    def wait_text(self, selector: str, text: str) -> None:
        """Until an element that a reader can see has a text in it."""
        self.wait(
            f"[...document.querySelectorAll({json.dumps(selector)})].some("
            f"n => n.checkVisibility() && n.innerText.includes({json.dumps(text)}))"
        )

    def count(self, selector: str) -> int:
        number: int = self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")
        return number

    def click(self, selector: str) -> None:
        """In the middle of the first such element: what lies over it would be hit instead."""
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{chosen}?.checkVisibility() && !{chosen}.disabled")
        x, y = self.evaluate(
            f"(() => {{ const n = {chosen}; n.scrollIntoView({{block: 'nearest'}});"
            "const r = n.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def ask(self, text: str) -> None:
        """Write a message and send it."""
        self.click("#prompt")
        self.type(text)
        self.press("Enter")

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        common: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        common["modifiers"] = SHIFT if shift else 0
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def choose_files(self, selector: str, paths: list[Path]) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def drop_files(self, selector: str, paths: list[Path]) -> None:
        x, y = self.evaluate(
            f"(r => [r.x + 40, r.y + 40])(document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect())"
        )
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """What the browser's console has: exceptions, broken policy, files that weren't there."""
        self.evaluate("1")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event.get("params", {})
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(json.dumps(params["args"]))
        return found

    def addresses(self) -> list[str]:
        """Every address that the tab asked for."""
        self.evaluate("1")
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def running_chromium(path: str) -> Iterator[Chromium]:
    with tempfile.TemporaryDirectory(
        prefix="duoka-chromium-", ignore_cleanup_errors=True
    ) as folder:
        browser = Chromium(path, Path(folder))
        try:
            yield browser
        finally:
            browser.close()
