"""The operator's command: `cleanslate-operator`, or `python -m cleanslate_operator`."""

import asyncio
import logging
import os
import sys
import time
from typing import NoReturn

from cleanslate_operator import api, connection, controller, events, logs, metrics, runtime, settings

_log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Run one replica. Ends with 0 after SIGTERM, 1 where it has to start anew, 2 for settings that can't be used."""
    given = settings.from_command_line(sys.argv[1:], os.environ)
    logs.configure(given.log_level)
    status = asyncio.new_event_loop().run_until_complete(_run(given))
    logging.shutdown()
    # At once: a process that lost its Lease must not tidy up first, and kopf's thread is not worth waiting for.
    os._exit(status)


async def _run(given: settings.Settings) -> int:
    try:
        configuration = await connection.load(given.kubeconfig)
    except connection.ConnectError as error:
        _log.critical("%s", error)
        return 2
    return await runtime.Runtime(given, configuration, _controller).run()


def _controller(
    client: api.Api, given: settings.Settings, recorder: events.Recorder, figures: metrics.Metrics
) -> runtime.Controller:
    return controller.Controller(client, given, recorder, figures, time.time)


if __name__ == "__main__":
    main()
