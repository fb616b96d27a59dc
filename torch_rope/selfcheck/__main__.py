import sys

from torch_rope.selfcheck.run import main

sys.exit(main())
