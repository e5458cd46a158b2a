"""Profiles a script that knows nothing of Stoker: `profile_script`."""

from stoker.tune.attach.profile import ScriptProfile
from stoker.tune.attach.script import profile_script

__all__ = ["ScriptProfile", "profile_script"]
