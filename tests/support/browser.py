"""Pages in Chromium without a window, as a user's browser shows them; nothing is asked of any network."""

import html
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


def run(path, script, width=1400, dark=False):
    """Return what an async function body returns on a page, as JSON, and the errors in the console."""
    page = path.read_text("utf-8")
    first = "<script>window.problems=[];addEventListener('error',(e)=>problems.push(e.message));</script>"
    last = (
        f"<script>(async()=>{{{script}}})().catch((e)=>({{error:String(e)}})).then((r)=>{{"
        "const o=document.createElement('pre');o.id='result';o.textContent=JSON.stringify([r,problems]);"
        "document.body.append(o);});</script></body>"
    )
    tried = path.with_name(f"tried-{width}-{path.name}")
    tried.write_text(page.replace("<head>", f"<head>{first}", 1).replace("</body>", last), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    flags += [
        f"--window-size={width},900",
        f"--user-data-dir={path.parent / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", tried.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    result, problems = json.loads(html.unescape(found[1]))
    # What the tests wrote.
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "getImageData" not in line]
    return result, problems + said
