"""Opens pipes, forks, and prints how many of them are others in the child."""

import os

pipes = [end for _ in range(100) for end in os.pipe()]
before = [os.fstat(end).st_ino for end in pipes]
child = os.fork()
if child == 0:
    os._exit(sum(os.fstat(end).st_ino != inode for end, inode in zip(pipes, before, strict=True)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
