from __future__ import annotations

import sys

from slime_hpc.driver.main import main

sys.exit(main(sys.argv[1:]))
