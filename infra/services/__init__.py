"""The local services: a private, supervised Prefect server, Ray head and process worker below one folder."""

from infra.services.errors import ServiceError
from infra.services.layout import Service
from infra.services.stack import ServiceStack, ServiceStatus, StackAddresses, StackStatus

__all__ = ["Service", "ServiceError", "ServiceStack", "ServiceStatus", "StackAddresses", "StackStatus"]
