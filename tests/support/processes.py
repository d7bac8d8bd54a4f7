"""Python programs that tests run in processes of their own."""

import os
import subprocess
import sys
import textwrap

from tests.support.paths import ROOT


def run_python(code, *arguments, options=(), **environment):
    """Run code that imports this repository on CPUs; fail with what it printed unless it ends well."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *options, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def devices(count):
    """Return the environment in which JAX finds so many CPU devices."""
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"}
