# SPDX-License-Identifier: Apache-2.0
"""torchrelay: compile once, pass it on."""

__version__ = "0.1.0"
