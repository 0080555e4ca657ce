export * from "preact";
export * from "preact/hooks";
/** What a template may hold; handlers and functions as children get whatever the element or the component passes. */
type TemplateValue = string | number | boolean | null | undefined | object | ((argument: any, ...more: any[]) => any);
export const html: (strings: TemplateStringsArray, ...values: TemplateValue[]) => any;
