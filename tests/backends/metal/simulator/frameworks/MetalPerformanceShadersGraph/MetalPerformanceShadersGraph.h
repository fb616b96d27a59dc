#pragma once

@class MPSGraph, MPSGraphCompilationDescriptor, MPSGraphExecutionDescriptor;
