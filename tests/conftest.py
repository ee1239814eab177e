"""What holds for every test."""

import signal

# A shell's background jobs ignore Ctrl-C, and so would every script that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
