"""Profiles a script that does not use Stoker: `profile_script`."""

from stoker.scriptprofile.profile import ScriptProfile
from stoker.scriptprofile.script import profile_script

__all__ = ["ScriptProfile", "profile_script"]
