"""The keys of this room in the store of a job, all below `fleet/`. They outlive a run, as instances do.

============================= ============================== ==========================================
key                           written by                     value
============================= ============================== ==========================================
fleet/keeper/<lease>          agents, under lease            name of the node; the oldest keeps the fleet
fleet/ledger                  the keeper                     JSON, see `cloud.ledger`
fleet/cost                    the keeper                     JSON, see `cloud.meter`
fleet/nodes/<node>            its agent, under lease         JSON, see `cloud.identity`
fleet/notices/<node>          its agent, under lease         JSON, see `cloud.notices`
============================= ============================== ==========================================
"""

from __future__ import annotations

FLEET = "fleet/"
KEEPER = f"{FLEET}keeper"
LEDGER = f"{FLEET}ledger"
COST = f"{FLEET}cost"
NODES = f"{FLEET}nodes/"
NOTICES = f"{FLEET}notices/"


def node(name: str) -> str:
    """Return the key that says what machine a node is."""
    return f"{NODES}{name}"


def notice(name: str) -> str:
    """Return the key that says that a node will be taken away."""
    return f"{NOTICES}{name}"
