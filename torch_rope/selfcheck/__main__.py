import sys

from torch_rope.selfcheck.main import main

sys.exit(main())
