#!/usr/bin/env python3
"""Parses a metrics page on standard input strictly. Prints type and number of samples of each family as JSON."""

import json
import sys

from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics

PARSERS = {
    "openmetrics": openmetrics.text_string_to_metric_families,
    "prometheus": prometheus.text_string_to_metric_families,
}
families = PARSERS[sys.argv[1]](sys.stdin.read())
json.dump({family.name: [family.type, len(family.samples)] for family in families}, sys.stdout)
