"""`python -m workers.supervisor FD CLIENT DIRECTORY LOG DEVICES RANK_MODULE`, as the client starts it; FD is one end of
a socket pair whose other end the client holds, CLIENT is the client's pid."""

import asyncio
import shutil
import socket
import sys
from pathlib import Path

from ..launch import PoolSpec
from ..leftovers import become_subreaper
from ..state_folder import PoolLog
from .supervisor import Supervisor

descriptor, parent, directory, log_path, spec, rank_module = sys.argv[1:7]
become_subreaper()
client = socket.socket(fileno=int(descriptor))
log = PoolLog(Path(log_path))
try:
    asyncio.run(Supervisor(client, int(parent), PoolSpec.parse(spec), Path(directory), log, rank_module).run())
finally:
    shutil.rmtree(directory, ignore_errors=True)  # the client may be gone, so it is removed here
