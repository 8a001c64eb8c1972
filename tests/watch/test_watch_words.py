"""The dashboard's numbers as people read them, psd/watch/dashboard/static/words.js, in Node.js. Skipped where there is none."""

import json
import shutil
import subprocess
from importlib import resources

import pytest

NODE = shutil.which("node") or shutil.which("nodejs")

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node.js on this machine")


@pytest.mark.parametrize(
    ("function", "values", "texts"),
    [
        ("short", [2e-7, 4.3e-5, 0.0123, 0.9994, 0.9996, 1, 9.96], "0_µs 43_µs 12.3_ms 999_ms 1.0_s 1.0_s 10.0_s"),
        ("rate", [0, 0.25, 9.996, 99.96, 1470.4, 2.5e6], "0.00 0.25 10.00 100.0 1470 2500000"),
    ],
)
def test_a_fast_job_has_times_and_rates_without_an_exponent(function, values, texts):
    """Also where rounding gives a number one more digit."""
    source = (resources.files("psd.watch.dashboard") / "static" / "words.js").read_text()
    source = source.replace('import { FACTS } from "./facts.js";', "")
    call = f"console.log(JSON.stringify({json.dumps(values)}.map({function})));"
    done = subprocess.run(
        [NODE, "--input-type=module"], input=f"{source}\n{call}", capture_output=True, text=True, check=False, timeout=200
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [text.replace("_", " ") for text in texts.split()]
