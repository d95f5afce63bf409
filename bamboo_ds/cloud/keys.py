"""The keys of this room in the store of a job. Those below `fleet/` outlive a run, as instances do.

============================= ============================== ==========================================
key                           written by                     value
============================= ============================== ==========================================
fleet/keeper/<lease>          agents, under lease            name of the node; the oldest keeps the fleet
fleet/ledger                  the keeper                     JSON, see `cloud.ledger`
fleet/cost                    the keeper                     JSON, see `cloud.meter`
fleet/nodes/<node>            its agent, under lease         JSON, see `cloud.identity`
desk/leaving/<node>           its agent, under lease         JSON, see `cloud.notices`
============================= ============================== ==========================================

The last is on the coordinator's desk (`elastic.keys`): it is to hear of it at once.
"""

from __future__ import annotations

from bamboo_ds.elastic.keys import DESK, FINISHED, failure

FLEET = "fleet/"
KEEPER = f"{FLEET}keeper"
LEDGER = f"{FLEET}ledger"
COST = f"{FLEET}cost"
NODES = f"{FLEET}nodes/"
LEAVING = f"{DESK}leaving/"

OVER_KEYS = (FINISHED, failure("job"))
"""Any of them says that the job is over."""


def node(name: str) -> str:
    """Return the key that says what machine a node is."""
    return f"{NODES}{name}"


def leaving(name: str) -> str:
    """Return the key that says that a node will be taken away."""
    return f"{LEAVING}{name}"
