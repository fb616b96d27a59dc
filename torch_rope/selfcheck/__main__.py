import sys

from torch_rope.selfcheck import run, worker

if sys.argv[1:2] == ["--worker"]:
    worker.main(sys.argv[2])
else:
    sys.exit(run.main())
