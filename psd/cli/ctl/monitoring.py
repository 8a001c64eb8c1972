"""`psdctl monitoring`: prints the Grafana dashboard and the Prometheus alert rules for psd's metrics, which are part of the
wheel.

Knows where these files are, but not what they contain.
"""

from __future__ import annotations

import argparse
from importlib import resources

from psd.cli.words import arguments
from psd.cli.words.arguments import EXIT_OK, Commands

_FILES = {"dashboard": "grafana/psd-dashboard.json", "alerts": "prometheus/alerts.yaml"}

_DESCRIPTION = """\
Print a Grafana dashboard, or alert rules for Prometheus, for the metrics that shards serve with
--metrics-port."""

_EPILOG = """\
examples:
  psdctl monitoring dashboard > psd-dashboard.json     then import it in Grafana
  psdctl monitoring alerts > psd-alerts.yaml           then name it in prometheus.yml, under rule_files

The times in the rules are to begin with; adapt them to the job.

exit status:
  0     printed
  2     the options are wrong"""


def add_command(commands: Commands) -> None:
    """Add `monitoring` to psdctl."""
    parser = arguments.add_command(commands, "monitoring", "dashboard|alerts", _DESCRIPTION, _EPILOG)
    what = parser.add_argument_group("what to print")
    what.add_argument("what", choices=_FILES, help="the dashboard, as JSON, or the alert rules, as YAML")
    parser.finish(_run)


def _run(args: argparse.Namespace) -> int:
    print((resources.files("psd.cli") / "deploy" / _FILES[args.what]).read_text(), end="")
    return EXIT_OK
