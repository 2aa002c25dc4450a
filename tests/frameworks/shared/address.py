# SPDX-License-Identifier: Apache-2.0
"""The gateway's address and a key, for programs that hand them to a client as gateway/README.md shows it.

No client can find them in the environment then.
"""

import os

URL = os.environ.pop("OPENAI_BASE_URL")
WS_URL = URL.replace("http", "ws", 1) + "/realtime"
KEY = os.environ.pop("OPENAI_API_KEY")
