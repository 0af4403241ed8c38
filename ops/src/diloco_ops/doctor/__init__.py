"""``diloco doctor``: looks for usual mistakes before a service joins a run.

Pure: :mod:`needs`, a run's needs of a machine and its links; :mod:`access`, a service's access to its servers; :mod:`verdicts`,
judgements of measurements. :mod:`machine`, :mod:`reach` and :mod:`server` measure; :mod:`island` measures and judges what only
a learner of several devices or hosts needs. :mod:`examination` makes one check after another, :mod:`command` is the command.
"""
