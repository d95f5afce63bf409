"""What EC2's errors mean and what to do about each: one table."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from bamboo_ds.cloud.trouble import CloudError, Trouble

__all__ = ["explain_code", "request"]

Answer = TypeVar("Answer")

_NONE_NEEDED = "none is needed: it is asked again later"
_LASTING = 4.0  # as much more patience for what a person must mend
_TYPES = "list more instance_types or subnets in the cloud file to be refused less"

_CAPACITY = {
    "InsufficientInstanceCapacity": ("EC2 has no such instance left", f"{_NONE_NEEDED}; {_TYPES}"),
    "InsufficientCapacity": ("EC2 has no such instance left", f"{_NONE_NEEDED}; {_TYPES}"),
    "UnfulfillableCapacity": ("EC2 cannot fill this order", f"{_NONE_NEEDED}; {_TYPES}"),
    "InsufficientFreeAddressesInSubnet": ("the subnet has no address left", "give the zone a larger subnet"),
    "SpotMaxPriceTooLow": ("the spot price is above ec2.max_price", "raise ec2.max_price, or leave it out"),
    "Unsupported": ("the zone has no instances of this type", "leave the zone or the type out of the cloud file"),
}
"""What is true of one zone."""

_QUOTA = "ask for a higher limit in the console (Service Quotas, Amazon EC2), or for a smaller fleet"
_TEMPLATE = "make it with `bamboo-ds cloud launch-template --create`, or mend ec2.launch_template in the cloud file"
_KEYS = "renew the credentials that boto3 finds (role, environment, ~/.aws); they are read again at the next try"
_POLICY = "give the role of the nodes the policy of docs/ec2.md (`bamboo-ds cloud policy` prints it)"

_GLOBAL = {
    "MaxSpotInstanceCountExceeded": ("the account may have no more spot instances", _QUOTA),
    "VcpuLimitExceeded": ("the account may have no more vCPUs", _QUOTA),
    "InstanceLimitExceeded": ("the account may have no more instances of this type", _QUOTA),
    "MaxConfigLimitExceeded": ("the account may have no more of this", _QUOTA),
    "PendingVerification": ("EC2 is verifying the account", "wait for the mail of AWS; it is asked again meanwhile"),
    "OptInRequired": ("the account has not subscribed to this service or image", "subscribe in the AWS console"),
    "ExpiredToken": ("the credentials have expired", _KEYS),
    "ExpiredTokenException": ("the credentials have expired", _KEYS),
    "RequestExpired": ("the credentials have expired, or this machine's clock is wrong", f"{_KEYS}; check the clock"),
    "AuthFailure": ("AWS does not know these credentials", _KEYS),
    "InvalidClientTokenId": ("AWS does not know these credentials", _KEYS),
    "UnrecognizedClientException": ("AWS does not know these credentials", _KEYS),
    "SignatureDoesNotMatch": ("the secret key is wrong, or this machine's clock is", f"{_KEYS}; check the clock"),
    "UnauthorizedOperation": ("the credentials may not do this", _POLICY),
    "AccessDenied": ("the credentials may not do this", _POLICY),
    "AccessDeniedException": ("the credentials may not do this", _POLICY),
    "InvalidLaunchTemplateName.NotFoundException": ("there is no such launch template", _TEMPLATE),
    "InvalidLaunchTemplateId.NotFound": ("there is no such launch template", _TEMPLATE),
    "InvalidAMIID.NotFound": ("the launch template's image does not exist in this region", _TEMPLATE),
    "InvalidSubnetID.NotFound": ("there is no such subnet in this region", "mend ec2.subnets in the cloud file"),
    "InvalidGroup.NotFound": ("there is no such security group", _TEMPLATE),
    "InvalidParameterValue": ("EC2 does not accept a value", "mend what it names, in the cloud file or the template"),
    "ValidationError": ("the Auto Scaling group does not accept this", "mend ec2.group in the cloud file"),
}
"""What is true everywhere, until a person mends it."""

_BUSY = {
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "ScalingActivityInProgress",
    "ResourceContention",
}
_BROKEN = {"InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable", "RequestTimeout"}


def explain_code(code: str, message: str, *, zone: str = "") -> Trouble:
    """Return what an error of EC2 means, and what to do."""
    said = f" (EC2 says: {' '.join(message.split())})" if message else ""
    if code in _CAPACITY:
        text, remedy = _CAPACITY[code]
        return Trouble(code, text + said, remedy, zone)
    if code in _GLOBAL:
        text, remedy = _GLOBAL[code]
        return Trouble(code, text + said, remedy, patience=_LASTING)
    if code in _BUSY:
        return Trouble(code, f"EC2 asks us to slow down{said}", _NONE_NEEDED)
    if code in _BROKEN:
        return Trouble(code, f"EC2 has a problem of its own{said}", _NONE_NEEDED)
    return Trouble(code, f"EC2 refused{said}", "see the EC2 documentation of this error code", patience=_LASTING)


def request(call: Callable[..., Answer], *, zone: str = "", again: bool = False, **arguments: Any) -> Answer:
    """Make a request of boto3.

    Args:
        call: method of a client.
        zone: that it is about.
        again: whether it may have been made before. Then an error says only that *this* one was not heard.
        arguments: of the call.

    Raises:
        CloudError: it failed.
    """
    from botocore import exceptions

    try:
        return call(**arguments)
    except exceptions.ClientError as error:
        found = error.response.get("Error", {})
        code, message = str(found.get("Code", "Unknown")), str(found.get("Message", ""))
        trouble = explain_code(code, message, zone=zone)
        raise CloudError(trouble, code in _BROKEN or (again and code not in _CAPACITY)) from None
    except exceptions.BotoCoreError as error:
        raise CloudError(_explain_local(error), again or not _never_sent(error)) from None


def _never_sent(error: Exception) -> bool:
    from botocore import exceptions

    kinds = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.NoRegionError,
        exceptions.EndpointConnectionError,
        exceptions.ConnectTimeoutError,
        exceptions.ParamValidationError,
    )
    return isinstance(error, kinds)


def _explain_local(error: Exception) -> Trouble:
    """Return what an error means that was raised on this side."""
    code = re.sub(r"Error$", "", type(error).__name__)
    text = " ".join(str(error).split())
    if code in ("NoCredentials", "PartialCredentials", "CredentialRetrieval", "TokenRetrieval", "SSOToken"):
        return Trouble(code, f"boto3 finds no credentials ({text})", _KEYS, patience=_LASTING)
    if code == "NoRegion":
        remedy = "set ec2.region in the cloud file, or AWS_DEFAULT_REGION"
        return Trouble(code, f"boto3 finds no region ({text})", remedy, patience=_LASTING)
    if code == "ParamValidation":
        return Trouble(code, f"boto3 does not accept this ({text})", "mend the cloud file", patience=_LASTING)
    remedy = "it is asked again later; look at route, proxy and firewall to the region's endpoints"
    return Trouble(code, f"EC2 does not answer ({text})", remedy)
