# SPDX-License-Identifier: Apache-2.0
"""Print one half of README's test command, as it is written there: ``install`` or ``test``."""

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
COMMAND = re.compile(r'^(pip install -e "\.\[dev\]") && (pytest.*)$', re.MULTILINE)

found = COMMAND.findall(README.read_text(encoding="utf-8"))
if len(found) != 1:
    sys.exit("README.md must hold the test command exactly once")
print(found[0][("install", "test").index(sys.argv[1])])
