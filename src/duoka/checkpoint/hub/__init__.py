"""The Hub: checkpoints by their id, through huggingface_hub.

The only room that talks to a server. Where the Hub is, who asks it, whether it may be asked at all
and where its files are kept is huggingface_hub's to say (HF_ENDPOINT, HF_TOKEN or a login,
HF_HUB_OFFLINE, HF_HOME). What a server sends is believed as little as a file.
"""

from .names import HubName, parse_name
from .snapshot import Snapshot, open_snapshot

__all__ = ["HubName", "Snapshot", "open_snapshot", "parse_name"]
