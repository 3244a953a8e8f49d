"""A browser without a window, driven through the pipe of its debugging protocol: no package is needed."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'))), None
)
# Its debugging protocol is spoken on the descriptors 3 and 4.
EXECUTE = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3]]
for pipe, number in zip(pipes, (3, 4)):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A page in a browser; a context that ends it.

    Args:
        folder: For the profile of the browser.
        size: (width, height) of the window in pixels.
    """

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 1600)) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        options = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--remote-debugging-pipe']
        # Animations are drawn by the processor.
        options += ['--force-prefers-reduced-motion', '--disable-extensions', '--no-first-run']
        options += [f'--user-data-dir={folder}/profile', f'--window-size={size[0]},{size[1]}', 'about:blank']
        command = [sys.executable, '-c', EXECUTE, str(read), str(write), str(CHROMIUM), *options]
        self._process = subprocess.Popen(command, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self._buffer, self._ids, self._session = b'', itertools.count(1), None
        target = next(x for x in self.call('Target.getTargets')['targetInfos'] if x['type'] == 'page')
        self._session = self.call('Target.attachToTarget', targetId=target['targetId'], flatten=True)['sessionId']

    def __enter__(self) -> 'Browser':
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        number = next(self._ids)
        session = {} if self._session is None else {'sessionId': self._session}
        os.write(
            self._write, json.dumps({'id': number, 'method': method, 'params': params, **session}).encode() + b'\0'
        )
        while True:
            while b'\0' not in self._buffer:
                received = os.read(self._read, 2**16)
                assert received, 'the browser has ended'
                self._buffer += received
            message, _, self._buffer = self._buffer.partition(b'\0')
            answer = json.loads(message)
            if answer.get('id') == number:
                assert 'error' not in answer, answer
                return answer['result']

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript."""
        return self.call('Runtime.evaluate', expression=expression, returnByValue=True)['result'].get('value')

    def wait_for(self, expression: str, seconds: float) -> Any:
        """Return the value of an expression as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f'{expression} is not true after {seconds} s'
            time.sleep(0.2)
        return value

    def click(self, selector: str, x: float, y: float) -> None:
        """Click at a place of an element, in shares of its width and height."""
        left, top, width, height = self.evaluate(
            f'(r => [r.x, r.y, r.width, r.height])(document.querySelector({selector!r}).getBoundingClientRect())'
        )
        place = {'x': left + x * width, 'y': top + y * height, 'button': 'left', 'clickCount': 1}
        for kind in ('mousePressed', 'mouseReleased'):
            self.call('Input.dispatchMouseEvent', type=kind, **place)

    def screenshot(self, path: Path) -> None:
        """Save the whole page."""
        data = self.call('Page.captureScreenshot', captureBeyondViewport=True)['data']
        path.write_bytes(base64.b64decode(data))
