"""Prints the options of `dynamo.vllm` and `dynamo.frontend` of the installed package `ai-dynamo`.

For each option: the number of its values (0, 1 or "+"), and the allowed ones. Options of vLLM itself
are not listed. Recorded: PYTHONPATH=WHEEL python3 record_arguments.py > arguments-1.6.1.json
"""

import argparse
import json

from dynamo.common.configuration.groups.router_args import register_worker_router_help
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup
from dynamo.frontend.frontend_args import FrontendArgGroup
from dynamo.vllm.backend_args import DynamoVllmArgGroup


def options(*registrations):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for register in registrations:
        register(parser)
    found = {}
    for action in parser._actions:
        values = action.nargs if action.nargs is not None else 1
        choices = sorted(map(str, action.choices)) if action.choices else None
        for name in action.option_strings:
            if name.startswith("--"):
                found[name] = {"values": values, **({"choices": choices} if choices else {})}
    return dict(sorted(found.items()))


print(
    json.dumps(
        {
            "dynamo.vllm": options(
                DynamoRuntimeArgGroup().add_arguments,
                DynamoVllmArgGroup().add_arguments,
                register_worker_router_help,
            ),
            "dynamo.frontend": options(FrontendArgGroup().add_arguments),
        },
        indent=1,
    )
)
