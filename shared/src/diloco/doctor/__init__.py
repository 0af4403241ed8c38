"""``diloco doctor``: what usually goes wrong when a service is to join a run, looked for before it does.

:mod:`needs` says what a run asks of a machine and its links, :mod:`deeds` what a service does at its servers, :mod:`verdicts`
what follows from something measured; these are pure. :mod:`machine` and :mod:`server` measure, :mod:`examination` does one
check after another, :mod:`command` is the command.
"""
