"""The JSON Schema of a scenario file, for editors; derived from the models.

It says less than ``faultlab check``: which codes a site can return, say, or
whether a rank is inside the topology.
"""

from __future__ import annotations

from typing import Any, Final

from faultlab.scenario.invariants import INVARIANTS
from faultlab.scenario.written import WrittenScenario
from faultlab.sites import ATTRIBUTES, SITES

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of a scenario file as it is written."""
    schema = WrittenScenario.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    definitions["Fault"]["properties"]["at"]["enum"] = [
        *SITES,
        *(f"cuDeviceGetAttribute({name})" for name in ATTRIBUTES),
    ]
    definitions["Expect"]["properties"]["breaks"]["propertyNames"] = {"enum": list(INVARIANTS)}
    schema["properties"]["matrix"]["description"] = (
        "Axes to values: a top key or a dotted path to a list of values or to labels with values; "
        "'case' to labels with several paths each; 'exclude' to combinations that are left out."
    )
    schema["title"] = "faultlab scenario"
    return {"$schema": DIALECT, **schema}
